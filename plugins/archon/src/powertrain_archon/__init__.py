"""The training backend archon of powertrain; kept free of imports."""
