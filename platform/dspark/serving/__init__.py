"""Ray Serve around the engine: the OpenAI API, replicas, the fleet scheduler."""
