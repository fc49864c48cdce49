"""Where the time of a step goes: marks inside the captured graph, or the graph with and without a stage."""
