"""Facts and collectives of the machine a run is on."""
