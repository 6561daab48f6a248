"""Models of timm and torchvision: the smallest of each family, on small images.

Penstock does not depend on these packages. Install them with `pip install timm torchvision`.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from hf import names
from torch import nn

__all__ = ["LARGE", "TIMM", "TORCHVISION", "build_picture", "declare_operations"]

SIZES = (64, 96, 128, 160, 192, 224, 256, 299, 384)
FILM_SIZES, FRAMES = (32, 64, 112, 224), (4, 8, 16)  # convolutions in three dimensions are slow in float64

# one small model from each file of timm 1.0.31, if the file has one
TIMM = names("""
    halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext cpubone_nano
    crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c
    dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1
    efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf
    gcvit_tiny ghostnet_050 hardcorenas_c hgnet_tiny hiera_tiny_224 hrnet_w18_small iformer_s inception_next_atto
    inception_v3 lcnetv2_small levit_384_s8 lowformer_b0 test_mambaout test_maxvit caformer_s18 gmlp_ti16_224
    tf_mobilenetv3_large_minimal_100 mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_siglip nest_tiny nextvit_small
    test_nfnet pit_xs_224 pvt_v2_b0 rdnet_tiny regnety_040_sgn repghostnet_050 repvit_m0_9 res2net50_14w_8s
    resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s050
    swiftformer_xs swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224
    twins_svt_small vgg11 visformer_tiny test_vit test_vit_relpos samvit_base_patch16 vitamin_small_224 volo_d1_224
    ese_vovnet19b_slim xception xception41 xcit_nano_12_p8_224
""")
TORCHVISION = names("""
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d
    shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_32 deeplabv3_mobilenet_v3_large fcn_resnet50
    lraspp_mobilenet_v3_large r3d_18 mc3_18 r2plus1d_18 s3d
""")


def build_picture(name: str, batch_size: int) -> tuple[nn.Module, Any]:
    """Return a model named `timm:…` or `torchvision:…`, and images of the smallest size that it accepts."""
    package, _, kind = name.partition(":")
    sizes = [(size, frames) for size in FILM_SIZES for frames in FRAMES] if kind in _FILMS else [(n, 0) for n in SIZES]
    for size, frames in sizes:
        for options in ({"img_size": size}, {}) if package == "timm" else ({"image_size": size}, {}):
            with contextlib.suppress(Exception):
                torch.manual_seed(0)
                model = _made(package, kind, options)
                pictures = torch.randn(batch_size, 3, *((frames,) if frames else ()), size, size)
                with torch.no_grad():
                    model.train()(pictures[:2])
                torch.manual_seed(0)
                return _made(package, kind, options), pictures
    raise ValueError(f"{name} takes pictures of none of these sizes: {SIZES}")


# these get a batch of 4: in float64, a batch of 16 is too much for two cores with 24 GiB
LARGE = ("timm:halonet_h1", "torchvision:maxvit_t", "torchvision:s3d")
_FILMS = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")  # video models


def _made(package: str, kind: str, options: dict[str, Any]) -> nn.Module:
    declare_operations()
    if package == "timm":
        import timm

        return timm.create_model(kind, pretrained=False, num_classes=10, **options)
    import torchvision

    return torchvision.models.get_model(kind, weights=None, **options)


@cache
def declare_operations() -> list[torch.library.Library]:
    """Declare torchvision's own operations, so that it can be imported with a torch without CUDA.

    The wheel of torchvision has operations for CUDA. A torch without CUDA does not load them, and then the import
    fails. The models of this benchmark do not use these operations.
    """
    if torch.version.cuda:
        return []
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return [library]
