"""From the user's program to the IR: Dynamo's graph, differentiated by AOTAutograd, as one function."""
