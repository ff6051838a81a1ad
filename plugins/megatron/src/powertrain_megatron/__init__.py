"""The training backend megatron of powertrain; kept free of imports."""
