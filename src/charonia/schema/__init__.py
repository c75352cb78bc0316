"""The protocol's messages: schema text and the classes made from it in a private descriptor pool."""
