"""The steps of a declarative ensemble, `tokenize_<bucket>` and `encoder_<bucket>_queued`; contract in docs/queue.md."""
