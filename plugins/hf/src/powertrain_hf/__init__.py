"""transformers in this process as an inference engine of powertrain."""
