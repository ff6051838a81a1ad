"""The inference backend sglang of powertrain; kept free of imports."""
