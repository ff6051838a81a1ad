"""Numerics shared by torch engines, and the transfers that ship with core; the one subpackage that may import torch.

Importing this package itself stays light; each module imports what it needs.
"""
