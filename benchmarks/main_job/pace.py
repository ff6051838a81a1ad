"""How the two sides are made to take turns: a side waits before each step until it is told to go.

Standard library only, since it runs in both environments. The two pipes' numbers stand in an environment variable, so
that they outlive a process that replaces itself (`powertrain run` does, to set its environment).
"""

import contextlib
import json
import os
import resource
import select
import subprocess
import time

PIPES = "BENCH_PIPES"


class Follower:
    """The side that is told what to do; lives in the measured process."""

    def __init__(self):
        listen, speak = map(int, os.environ[PIPES].split(","))
        os.set_inheritable(listen, True)
        os.set_inheritable(speak, True)
        self._orders, self._speak, self._cpu = os.fdopen(listen), speak, 0.0

    def wait(self):
        """Block until the next step may begin; False when there is to be none."""
        go = self._orders.readline().strip() == "go"
        self._cpu = time.process_time()
        return go

    def tell(self, **facts):
        """Send one line of facts: `ready` before the first step, or what a step took; CPU seconds: of all threads."""
        facts["cpu_seconds"] = time.process_time() - self._cpu
        facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(self._speak, (json.dumps(facts) + "\n").encode())


class Lost(Exception):
    """A side ended, or hung, before it had answered."""


class Side:
    """A measured process as the benchmark sees it. name: for messages. log: file that gets its output."""

    def __init__(self, name, command, log, *, env, cwd):
        orders, self._orders = os.pipe()
        told_here, told = os.pipe()
        env = {**env, PIPES: f"{orders},{told}"}
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
                pass_fds=(orders, told),
            )  # fmt: skip
        os.close(orders)
        os.close(told)
        self.name, self._log, self._answers = name, log, os.fdopen(told_here)

    def facts(self, seconds=600):
        """Return the next line of facts; Lost, with the log's last line, when none comes or the process is gone."""
        if not select.select([self._answers], [], [], seconds)[0]:
            message = f"{self.name} said nothing for {seconds:g} s"
            raise Lost(message)
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            end = self._log.read_text().rstrip().rpartition("\n")[2]
            message = f"{self.name} ended with {status}: {end}"
            raise Lost(message)
        return json.loads(line)

    def step(self, seconds=600):
        """Let it take one step and return what the step took, with the machine's load before it."""
        load = os.getloadavg()[0]
        os.write(self._orders, b"go\n")
        return {**self.facts(seconds), "load_1min": round(load, 2)}

    def end(self, seconds=60):
        """Tell it to end, and kill it when it does not; a side that has failed already is no further fault."""
        with contextlib.suppress(OSError):
            os.write(self._orders, b"end\n")
        os.close(self._orders)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
