"""Variables that vLLM and torch read when they are imported; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain_vllm.settings import check

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec


def environment(options: Mapping[str, Any], spec: EngineSpec) -> dict[str, str]:
    """Return what a worker needs: vLLM's engine in its own process, and on a card batch-invariant kernels.

    Called before anything starts, so options that go against the run are refused here (`Violations`). A run's own `env`
    wins. On a CPU vLLM's batch-invariant mode does not start; what it would do is done there by MKL, whose products are
    otherwise rounded by how many rows are multiplied at once. Log-probs are then bitwise those of a request alone.
    """
    check(options, spec)
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if spec.place.rendezvous:  # what sets are gone through in must not differ between ranks
        found["PYTHONHASHSEED"] = "0"
    if spec.place.device == "cpu":
        same = {"MKL_CBWR": "AVX2,STRICT"} if spec.deterministic else {}
        return {**found, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", **same}
    return {**found, **({"VLLM_BATCH_INVARIANT": "1"} if spec.deterministic else {})}
