"""Tests on a real vLLM, in an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

import os

# vLLM and torch read these when they are imported.
os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="PASSIVE",
    OMP_NUM_THREADS="1",
) if os.environ.get("POWERTRAIN_TEST_ENVIRONMENT") == "vllm" else None
collect_ignore_glob = [] if os.environ.get("POWERTRAIN_TEST_ENVIRONMENT") == "vllm" else ["test_*.py"]
