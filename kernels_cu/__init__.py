"""CUDA sources, shipped as package data and compiled at run time."""
