"""Which layout and degrees suit a model, a cluster and a dataset (DistTrain, section 4); without torch."""
