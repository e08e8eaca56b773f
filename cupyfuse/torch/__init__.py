"""The door for PyTorch: modules and functions whose chains of operations run fused."""
