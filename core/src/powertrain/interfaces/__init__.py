"""What core and plugins share: data, build specs, and the abstract classes of engines, transfers and launchers."""
