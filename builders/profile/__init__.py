"""Where the time of a request goes, and what to turn: the request path, the GPU, the verdict."""
