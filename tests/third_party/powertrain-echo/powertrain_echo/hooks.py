from powertrain import AxisSpec, BackendSpec, hookimpl

AXES = ("d", AxisSpec("k", "echoes of a prompt"))


@hookimpl
def powertrain_backend():
    return BackendSpec(name="echo", role="infer", engine="powertrain_echo.engine:Echo", axes=AXES, api=(1, 0))
