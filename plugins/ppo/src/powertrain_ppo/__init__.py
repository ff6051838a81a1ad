"""The recipe ppo of powertrain; kept free of imports."""
