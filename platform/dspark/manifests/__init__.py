"""Checks of Kubernetes manifests, before a cluster sees them."""
