// Node.js 20 lacks what js-libp2p 3 uses; Node.js 22 has it.
if (Promise.withResolvers === undefined) {
  Promise.withResolvers = function () {
    const made = {}
    made.promise = new this((resolve, reject) => {
      made.resolve = resolve
      made.reject = reject
    })
    return made
  }
}
