"""The inference backend vllm of powertrain; kept free of imports."""
