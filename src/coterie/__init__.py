"""coterie: personalized federated learning with d-privacy, on Flower."""
