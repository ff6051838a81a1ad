"""vLLM's own weight transfer engine `ipc`, trainer and vLLM in two processes; called by `update.py`.

    python benchmarks/vllm/own_ipc.py MODEL_FOLDER OUT.json [--repeats 10]

The trainer's tensors lie on the card by their names in the checkpoint. One update is timed from the trainer's first
call to the answer of its last: start, all weights, finish, and the reset of the prefix cache. Calls go over a pipe.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def serve(folder: str, pipe: Any) -> None:
    """Be vLLM until the pipe closes."""
    from vllm import LLM

    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        gpu_memory_utilization=0.25,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "ipc"},
    )
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        if method == "norm":
            answer = llm.apply_model(lambda model: float(model.model.norm.weight.float().mean()))
        else:
            answer = getattr(llm, method)(*args)
        pipe.send(answer if method == "norm" else None)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    """Run both ways and write the file."""
    args = arguments()
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=serve, args=(args.folder, child), daemon=True)
    process.start()
    child.close()
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    weights = {}
    for file in sorted(Path(args.folder).glob("*.safetensors")):
        weights |= load_file(file, device="cuda")

    def hear(what: str) -> Any:
        if not pipe.poll(300):
            raise TimeoutError(what)
        return pipe.recv()

    def call(method: str, *values: Any) -> Any:
        pipe.send((method, values))
        return hear(method)

    hear("vLLM's start")
    call("init_weight_transfer_engine", {"init_info": {}})

    def send(info: Any) -> None:
        call("update_weights", {"update_info": {k: v for k, v in asdict(info).items() if v is not None}})

    found = {}
    for way, packed in (("plain", False), ("packed", True)):
        times = []
        for number in range(args.repeats + 2):
            weights["model.norm.weight"].fill_(number + 1 + 100 * packed)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call("start_weight_update")
            IPCWeightTransferEngine.trainer_send_weights(iter(weights.items()), {"send_mode": send, "packed": packed})
            call("finish_weight_update")
            call("reset_prefix_cache")
            times.append((time.perf_counter() - begun) * 1e3)
        arrived = call("norm")
        found[way] = {"ms": times[2:], "median_ms": statistics.median(times[2:]), "norm_arrived": arrived}
    args.out.write_text(json.dumps(found))
    pipe.close()
    process.join(30)


if __name__ == "__main__":
    main()
