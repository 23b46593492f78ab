"""MiniMind trained with n-D parallelism, each strategy written from scratch and proven equal to the dense model."""

__version__ = "0.1.0"
