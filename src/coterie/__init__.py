"""coterie: personalized federated learning with d-privacy, on Flower."""

import os

# Flower reads these when it is imported: nothing about a run is reported to anyone.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
