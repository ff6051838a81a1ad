"""The interfaces between core and plugins: data, build specs, and the abstract classes of engines, transfers and launchers."""
