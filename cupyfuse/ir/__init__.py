"""The intermediate representation: graphs of two-dimensional values, the operators in them, their adjoints."""
