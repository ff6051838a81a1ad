"""Faults at exact places, in the processes of a run and without a change of the product: first on a child's PYTHONPATH.

FAULTS is a list in JSON: `who` (a worker's name, or "driver"), `at` ("module:function" or "module:Class.method"),
`call` (which call of it in that process, from 1), `when` ("before" or "after") and `do`:
kill: SIGKILL of this very process; torn: half of the arguments' metrics line, then the same; linger: a second in which
the test may do something, then the process goes on; fill: the file system of the folder `disk` has no room from now on,
and the process goes on. FAULTS_TOLD is a file to which every process adds who it is and
which fault it met.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time

WORKER = json.loads(os.environ.get("POWERTRAIN_WORKER") or '{"name": "driver"}')
TOLD = os.environ["FAULTS_TOLD"]
MINE = [fault for fault in json.loads(os.environ.get("FAULTS") or "[]") if fault["who"] == WORKER["name"]]


def tell(**facts):
    """Add one line to the file that the test reads."""
    line = json.dumps({"who": WORKER["name"], "pid": os.getpid(), **facts}) + "\n"
    handle = os.open(TOLD, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)


def fill(folder):
    """Take all room that a file system has."""
    handle = os.open(f"{folder}/fill", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(handle, bytes(4096))
    os.close(handle)


def strike(fault, args):
    """Do what the fault says."""
    tell(met=fault["at"], do=fault["do"])
    if fault["do"] == "torn":
        path, step, _ = args
        with path.open("a") as stream:
            stream.write(json.dumps({"step": step, "loss": 0.25})[:-4])
    if fault["do"] in ("kill", "torn"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["do"] == "linger":
        time.sleep(1.0)
    if fault["do"] == "fill":
        fill(fault["disk"])


def wrapped(function, fault):
    """Count calls of a function and strike at the one that is meant."""
    calls = 0

    @functools.wraps(function)
    def counting(*args, **kwargs):
        nonlocal calls
        calls += 1
        meant = calls == fault["call"]
        if meant and fault["when"] == "before":
            strike(fault, args)
        result = function(*args, **kwargs)
        if meant and fault["when"] == "after":
            strike(fault, args)
        return result

    return counting


class Finder(importlib.abc.MetaPathFinder):
    """Wraps functions of a module as soon as it has been executed."""

    def find_spec(self, name, path, target=None):
        """Find a module that a fault names where it would be found anyway."""
        mine = [fault for fault in MINE if fault["at"].partition(":")[0] == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path) if mine else None
        for finder in sys.meta_path if mine and spec is None else ():
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                break
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for fault in mine:
                owner = module
                *way, last = fault["at"].partition(":")[2].split(".")
                for step in way:
                    owner = getattr(owner, step)
                setattr(owner, last, wrapped(getattr(owner, last), fault))

        spec.loader.exec_module = exec_module
        return spec


if MINE:
    sys.meta_path.insert(0, Finder())
ports = [WORKER["address"].rpartition(":")[2]] if "address" in WORKER else []
ports += [os.environ["MASTER_PORT"]] if os.environ.get("MASTER_PORT") else []
tell(prefix=WORKER.get("prefix", ""), ports=[int(port) for port in ports])
