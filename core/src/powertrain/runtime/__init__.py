"""Who runs where: the driver, its workers, the control channel between them, and the engines inside."""
