"""A run: its resolved configuration, its folder on disk, and what a recipe is handed."""
