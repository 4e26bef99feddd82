"""Label privacy: features may be seen, labels may not.

Every mechanism here is about data sets with equal features that differ in the label of one example (label differential
privacy). That is another relation than the one of the update releases, and the two guarantees are never added up.

Floating point: random choices are made by uniform numbers with 53 bits, so a probability is realised to within
2⁻⁵³ (1.1·10⁻¹⁶) per comparison. Probabilities below that are outside what the guarantees can promise in floats.
"""
