// The task of this example. Replace it by your own: it must fit the federation's model.
//
// A sample is one number c, and the loss of a sample is half the mean squared distance of all
// parameters to c. So it fits every model, and needs no data set.

export class ConstantsTask {
  constructor(samples = 21, testSamples = 5) {
    this.samples = samples;
    this.testSamples = testSamples;
    this.targets = Array.from({ length: samples }, (_, i) => 0.3 + (2 * i) / (samples - 1) - 1);
  }

  #mean(indices) {
    return indices.reduce((sum, i) => sum + this.targets[i], 0) / indices.length;
  }

  gradient(parameters, indices) {
    const mean = this.#mean(indices);
    return parameters.map((value) => value - mean);
  }

  loss(parameters, indices) {
    let sum = 0;
    let squares = 0;
    for (const value of parameters) {
      sum += value;
      squares += value * value;
    }
    const mean = sum / parameters.length;
    const target = this.#mean(indices);
    const targetSquares = indices.reduce((total, i) => total + this.targets[i] ** 2, 0);
    const spread = targetSquares / indices.length;
    return (squares / parameters.length - 2 * mean * target + spread) / 2;
  }

  /** Return an Evaluation message: the loss on this client's test data. */
  evaluate(parameters) {
    return { samples: this.testSamples, loss: this.loss(parameters, [0, 1, 2, 3, 4]) };
  }
}
