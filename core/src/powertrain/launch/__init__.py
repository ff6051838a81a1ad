"""The launcher that core brings: processes on this host."""
