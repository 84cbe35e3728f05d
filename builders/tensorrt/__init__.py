"""From a graph with explicit types to a TensorRT plan, whatever TensorRT is installed."""
