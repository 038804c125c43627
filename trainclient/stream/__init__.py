"""The stream client without torch: gRPC in, numpy arrays over recycled buffers out."""
