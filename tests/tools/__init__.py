"""Tools of the integration tests and the measurements: repositories, load, a lane of known service time."""
