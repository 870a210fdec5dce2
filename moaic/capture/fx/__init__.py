"""The FX graphs of AOTAutograd, read into functions of the IR, and the two stubs that it gets back in their place."""
