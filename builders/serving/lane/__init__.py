"""The lane model `encoder_<bucket>`: a thin adapter around an `Engine`."""
