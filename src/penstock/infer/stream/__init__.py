"""Stream: requests that flow through the stages of a model."""
