"""Performance model: what a step must cost, from the compiled graph and no GPU."""

from engine.model.gpus import GPUS, Gpu, gpu_named
from engine.model.predict import Prediction, ScalingPoint, predict, scaling

__all__ = ["GPUS", "Gpu", "Prediction", "ScalingPoint", "gpu_named", "predict", "scaling"]
