"""A byte-level Mixture-of-Experts language model, trained with its experts spread over devices."""
