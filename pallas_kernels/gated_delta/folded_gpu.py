"""placeholder"""
forward = backward = None
