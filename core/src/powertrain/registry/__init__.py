"""Plugins: what is installed, and one plugin's spec on request.

    registry = Registry()
    registry.list("backend")               # metadata only
    spec = registry.backend("fsdp")        # imports powertrain_fsdp.hooks and nothing else
    Engine = registry.load_class(spec)     # imports the heavy class

A plugin is an entry point in one of the groups of `KIND_OF_GROUP`; its value is a plain module (no module
`__getattr__`, empty package `__init__`) with one hook of `powertrain.hookspecs`. Every failure
is a `PluginError` whose message is one line that names the plugin, its dist, its version and the cause, and whose
`kind` is one of these words:

    unknown: no installed plugin has the name
    allow-list: the allow-list names something that is not installed
    blocked: the allow-list does not name the plugin
    duplicate: two dists offer the name
    removed: the plugin's own module or attribute is gone: a left-over or half-removed dist
    broken-import: importing the plugin's module raised
    missing-dependency: a package that the plugin imports is not installed
    not-a-module: the entry point is not a module
    hook-typo: the plugin implements a hook that core does not have
    bad-signature: the hook takes arguments that core does not pass
    no-hook: the module lacks the group's hook, or its marker
    raising-hook: the hook raised
    wrong-return: the hook returned something else than one spec of the right type and name
    api-too-new: the plugin was made for a newer API than this core's
    api-too-old: the plugin was made for an older major API than this core's
    unfinished: the class that the plugin names lacks methods of its interface (told by the check alone)
    not-ready: the plugin describes an engine that is not there yet
    crash: the child process that checked the plugin died
    deadline: the child process that checked the plugin did not end in time

`POWERTRAIN_PLUGINS` is an allow-list: words with commas between, each the name of a plugin (`vllm`) or of a dist
(`powertrain-vllm`, compared as packaging does). Not set, all plugins are allowed; set, only those named and core's
own (set to nothing: core's own alone). A word that fits nothing installed is an error. What is not allowed is never
imported, and does not count as a duplicate: naming the wished dist settles a clash.

One project seen twice (a left-over egg-info, a path given twice, an editable install over a wheel) is one dist: the
copy that Python would import from counts. Two projects with one name are a clash, told when that name is asked for.
"""

from powertrain.registry.discovery import ALLOW_VARIABLE, KIND_OF_GROUP, PluginInfo, PluginWarning, scan
from powertrain.registry.manager import Registry

__all__ = ["ALLOW_VARIABLE", "KIND_OF_GROUP", "PluginInfo", "PluginWarning", "Registry", "scan"]
