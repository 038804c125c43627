"""A backbone whose ranks share sequences in groups of unequal degrees (FlexSP, arXiv 2412.01523), wave by wave."""
