"""Models, one readable file each, assembled from `core`."""

from vision.models.dat import DAT
from vision.models.features import Features
from vision.models.image_encoder import ImageEncoder
from vision.models.restormer import Restormer
from vision.models.rnn import RNNDecoder, RNNEncoder
from vision.models.stem import CNNStem, ConvStem, PatchEmbedding
from vision.models.swin import Swin
from vision.models.swin_restorer import SwinRestorer
from vision.models.swin_v2 import FinetunedBias, SwinV2
from vision.models.vit import ViT

__all__ = [
    "DAT",
    "CNNStem",
    "ConvStem",
    "Features",
    "FinetunedBias",
    "ImageEncoder",
    "PatchEmbedding",
    "RNNDecoder",
    "RNNEncoder",
    "Restormer",
    "Swin",
    "SwinRestorer",
    "SwinV2",
    "ViT",
]
