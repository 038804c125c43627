"""Encoders, backbone stages and generators on devices of their own, wave by wave (DistTrain, arXiv 2408.04275)."""
