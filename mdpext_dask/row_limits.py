"""What a stored row may hold, so that it is a list of whole numbers: constants, and nothing to import."""

# Probabilities are stored as float32; from 2^-36 upwards each is an integer multiple of 2^-60, which
# is what makes exact integer sampling weights possible.
SMALLEST_PROBABILITY = 2.0**-36
# A row's weights, in units of 2^-60, must add up within 64 bits; a normalised row's total is 1.
LARGEST_TOTAL = 2.0
