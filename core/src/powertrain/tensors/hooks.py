"""The specs of core's own transfers; plain and torch-free."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import TransferSpec

_INSTALL = "pip install 'powertrain[torch]'"
VERIFY = OptionSpec(
    name="verify",
    type="int",
    default=0,
    minimum=0,
    help="Compare checksums of names and values on both sides in every Nth update, before it is published; 0: in none.",
)

DELTA = OptionSpec(
    name="delta",
    default="off",
    choices=("off", "host", "device"),
    help="Send only values that changed, where that is less; both sides keep the last update's bytes there, for that.",
)

LOCAL = TransferSpec(
    name="local",
    driver="powertrain.tensors.local:LocalTransfer",
    source="powertrain.tensors.local:LocalSource",
    sink="powertrain.tensors.local:LocalSink",
    reach=("process",),
    rank=10,
    summary="both engines in one process: shared storage in synchronous runs, else a copy",
    options=(
        OptionSpec(
            name="share",
            default="auto",
            choices=("auto", "yes", "no"),
            help="Let the inference engine use the trainer's own memory; auto does so in synchronous runs.",
        ),
        OptionSpec(
            name="synchronous",
            type="bool",
            default=False,
            help="Set by the recipe: no request is ever in flight while the trainer steps.",
        ),
        VERIFY,
    ),
    requires=("torch",),
    install=_INSTALL,
)

SHM = TransferSpec(
    name="shm",
    driver="powertrain.tensors.shm:ShmTransfer",
    source="powertrain.tensors.shm:ShmSource",
    sink="powertrain.tensors.shm:ShmSink",
    reach=("host", "process"),
    rank=20,
    summary="one host: engines read the trainer's own memory, or else a staging area that its ranks write in place",
    options=(
        OptionSpec(
            name="direct",
            type="bool",
            default=True,
            help="Let engines read weights in host memory from the trainer's own, where the system allows it.",
        ),
        OptionSpec(
            name="bucket_mb",
            type="int",
            default=32,
            minimum=1,
            help="Most MiB of one bucket; the staging area holds four, or as many as the weights need if fewer.",
        ),
        OptionSpec(
            name="folder",
            default=None,
            help="Folder in memory for the staging area; by default /dev/shm, else the temporary folder.",
        ),
        VERIFY,
    ),
    requires=("torch",),
    install=_INSTALL,
)


IPC = TransferSpec(
    name="ipc",
    driver="powertrain.tensors.ipc:IpcTransfer",
    source="powertrain.tensors.ipc:IpcSource",
    sink="powertrain.tensors.ipc:IpcSink",
    reach=("device",),
    rank=15,
    summary="colocated engines: every sink copies from the trainer's own device memory, by CUDA IPC",
    options=(
        OptionSpec(
            name="keep_open",
            type="bool",
            default=True,
            help="Keep the trainer's memory mapped between updates, until it moves; false maps it anew each time.",
        ),
        *(option for option in SHM.options if option.name != "direct"),
    ),
    requires=("torch",),
    install=_INSTALL,
)


DISK = TransferSpec(
    name="disk",
    driver="powertrain.tensors.disk:DiskTransfer",
    source="powertrain.tensors.disk:DiskSource",
    sink="powertrain.tensors.disk:DiskSink",
    reach=("network", "host", "process"),
    rank=60,
    summary="safetensors files with checksums, in a folder that both sides see",
    options=(
        OptionSpec(
            name="folder",
            default=None,
            help="Folder that the trainer and every engine see; by default the temporary one, for a single host.",
        ),
        OptionSpec(
            name="keep",
            type="int",
            default=1,
            minimum=0,
            help="Older versions that stay beside the one being written; after the run so many stay in `folder`.",
        ),
        OptionSpec(
            name="bucket_mb",
            type="int",
            default=1024,
            minimum=1,
            help="Most MiB of a tensor that are one block: what a rank holds of it in memory, with one checksum.",
        ),
        DELTA,
        VERIFY,
    ),
    requires=("torch",),
    install=_INSTALL,
)

P2P = TransferSpec(
    name="p2p",
    driver="powertrain.tensors.p2p:P2pTransfer",
    source="powertrain.tensors.p2p:P2pSource",
    sink="powertrain.tensors.p2p:P2pSink",
    reach=("network", "host"),
    rank=40,
    summary="rank to rank by the plan, over NCCL, HCCL or gloo, with groups of its own",
    options=(
        OptionSpec(
            name="backend",
            default="auto",
            choices=("auto", "gloo", "nccl", "hccl"),
            help="What carries weights; auto goes by the devices, and takes gloo on CPU or where ranks share a card.",
        ),
        OptionSpec(
            name="host",
            default="127.0.0.1",
            help="Address of the driver's host at which all ranks meet; the port is a free one.",
        ),
        OptionSpec(
            name="bucket_mb",
            type="int",
            default=256,
            minimum=1,
            help="Most MiB of one bucket; a rank has at most two under way.",
        ),
        DELTA,
        VERIFY,
    ),
    requires=("torch",),
    install=_INSTALL,
)


@hookimpl
def powertrain_transfer() -> list[TransferSpec]:
    """Describe all transfers of core."""
    return [LOCAL, SHM, IPC, DISK, P2P]
