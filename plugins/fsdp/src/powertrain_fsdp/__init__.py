"""Training with torch FSDP2, as a plugin of powertrain."""
