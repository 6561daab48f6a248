"""Random models, losses and pipelines: each equals the plain model or is refused with a reason."""
