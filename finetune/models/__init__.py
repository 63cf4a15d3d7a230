"""Models: loaded, adapted, quantised, and seen as blocks with a head."""
