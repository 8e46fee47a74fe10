/* Browsers start no worker from a page on disk. A hidden frame runs the worker's script instead, so that search works there. */
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }))
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.tell(this, data)
      this.inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)))
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.inside.document.body.append(script)
      })
    }

    tell(target, data) {
      const event = new MessageEvent("message", { data })
      target.dispatchEvent(event)
      if (target.onmessage && target === this) target.onmessage(event)
    }

    postMessage(data) {
      this.ready.then(() => this.tell(this.inside, data))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.IFrameWorker = window.Worker = FrameWorker
}
