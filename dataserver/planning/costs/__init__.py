"""The cost model, and costs that were profiled on a device."""
